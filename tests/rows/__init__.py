"""Trainings as rows of a table: a value of each factor, run on real ranks and compared with one plain process."""
