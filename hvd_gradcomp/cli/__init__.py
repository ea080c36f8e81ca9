"""The commands of ``python -m hvd_gradcomp``: one file each."""
