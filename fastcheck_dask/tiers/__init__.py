"""Where checkpoints lie: slots in shared memory, storage nodes over the wire, the object tier."""
