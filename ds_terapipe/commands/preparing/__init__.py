"""The work of ``ds_terapipe prepare-data``: texts are read, become tokens in several processes, and are written in order."""
