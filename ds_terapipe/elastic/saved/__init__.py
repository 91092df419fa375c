"""The shape in a checkpoint, and its conversion to another one."""
