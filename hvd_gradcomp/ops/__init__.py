"""Array operations for numpy, torch and TensorFlow behind one closed list (``base.py``)."""
