"""What the master of the storage nodes does so that checkpoints outlive their trainer."""
