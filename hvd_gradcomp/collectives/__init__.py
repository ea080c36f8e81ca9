"""Transports: they combine what a flow sends, over Horovod, or in one process for tests."""
