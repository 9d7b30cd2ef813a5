"""Where keys and values are kept between ingestion and questions."""
