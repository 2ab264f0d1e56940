"""Commands on plugins: finding, checking, installing and beginning one, and the kits that prove it."""
