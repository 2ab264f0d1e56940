"""The page that `fdcore trace` writes: trace reader, packer, and the page's template, style and script."""
