"""The tier of several cache servers, its members: each chunk is in one of them."""
