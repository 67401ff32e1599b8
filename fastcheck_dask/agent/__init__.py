"""The agent: a process beside the trainer that encodes, sends and commits, and outlives its crash."""
