"""A plan as a picture: a timeline of micro-batches and cache bytes, as a Chrome trace and as a page. Never torch."""
