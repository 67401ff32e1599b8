"""FastCheck."""
