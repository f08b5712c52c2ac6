"""What one consumer wants on disk, one file each: stored names, packing, and the config section."""
