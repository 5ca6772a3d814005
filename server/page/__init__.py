"""The pages: at / a playground that shows the drafts at work, at /docs the API."""
