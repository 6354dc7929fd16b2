"""An HTTP server in the forms of llama.cpp's server, OpenAI and Anthropic. Needs the ``server`` extra."""
