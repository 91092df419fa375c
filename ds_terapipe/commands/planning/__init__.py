"""What ``plan`` and ``simulate`` have in common."""
