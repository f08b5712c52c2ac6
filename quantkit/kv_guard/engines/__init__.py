"""Plugins that guard the KV pages of a serving engine, which loads its plugin itself: none is imported here."""
