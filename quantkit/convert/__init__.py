"""Execute a plan and publish its result."""
