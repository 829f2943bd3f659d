"""Descant's web server: pages, forms, a JSON API and a live stream over run folders. It never imports torch."""
