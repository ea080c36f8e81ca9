"""The codecs: one frozen class each, framework-neutral. ``registry.py`` lists them."""
