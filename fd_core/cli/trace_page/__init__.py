"""The page that `fdcore trace` writes: what reads a trace, what packs it, and the page's template, style and script."""
