"""Parts of ``ds_terapipe check``: ranks of a launch, built one by one on memory that is never touched."""
