"""What every web service of ERNIEKit needs: a socket to listen on, a clean end, and who may ask. No Paddle."""
