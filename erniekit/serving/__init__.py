"""Answer others over HTTP, in OpenAI's form: `erniekit server`. Thin over `inference/`, in whose one scheduler all
requests are computed.

`engine_thread.py` owns Paddle; everything else runs in the event loop of the web server and knows no tensors.
"""
