"""Pure policy of the coordinator."""
