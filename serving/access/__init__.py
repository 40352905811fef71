"""Who may ask, over what, and how much."""
