"""Events of measured and predicted steps, as Chrome traces and as a summary. Standard library only."""
