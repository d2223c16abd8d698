"""Read a model and its inputs as the command line names them: files, images, random, ranges."""
