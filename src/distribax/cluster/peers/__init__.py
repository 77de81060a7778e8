"""Workers that train together: how they meet, watch each other and end."""
