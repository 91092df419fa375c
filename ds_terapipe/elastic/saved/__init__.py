"""What a checkpoint says of a shape, and the way out of it onto another one."""
