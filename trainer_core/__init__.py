"""Descant's training core: everything a run needs, usable without the web page."""
