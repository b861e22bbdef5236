"""A drafter on a hub: what goes up, its card, the upload."""
