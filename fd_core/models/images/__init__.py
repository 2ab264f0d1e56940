"""Image input of models: processors, which need no framework, and encoders."""
