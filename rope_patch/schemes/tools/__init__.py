"""Building blocks of schemes: positions, rotations, buckets, tables."""
