"""Commands on plugins: listing, checking, installing and creating them, and their conformance kits."""
