"""The operation behind FusedLamb: its tables, its back ends, and how they are compiled."""
