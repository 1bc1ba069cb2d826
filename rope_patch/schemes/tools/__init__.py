"""What schemes are written with: positions, rotations, buckets, tables."""
