"""Saving, loading and persisting: the decisions, with the tiers beneath."""
