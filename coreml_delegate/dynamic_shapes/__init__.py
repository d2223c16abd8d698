"""Dynamic sizes: enumerated shapes, ranges, and relations between sizes."""
