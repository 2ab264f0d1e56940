"""Pages for people: one HTML file each, with styles and scripts inside, so that a page loads nothing from elsewhere."""
