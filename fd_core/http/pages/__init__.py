"""HTML pages: one file each, with inline styles and scripts, so that a page loads nothing from other hosts."""
