"""A model and its inputs from what the command line says: files, images, random numbers, ranges."""
