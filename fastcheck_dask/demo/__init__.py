"""The demonstration: train, kill, recover, compare bit for bit."""
