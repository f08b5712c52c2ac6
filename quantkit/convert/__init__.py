"""Execute a plan and put its result in place."""
