"""The contract of every codec: laws (``laws.py``), and the specs they are held against (``specs.py``)."""
