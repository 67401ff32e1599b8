"""Which storage nodes hold which shard."""
