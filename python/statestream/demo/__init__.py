"""`statestream demo`: train, export half way, resume in a fresh optimizer, compare bit for bit."""
