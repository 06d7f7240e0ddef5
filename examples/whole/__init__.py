"""The demo's second act: a service that works on JSON, pictures and rows, which no array shows. ``make demo-whole``."""
