"""The Llama family and the tokens that it trains on."""
