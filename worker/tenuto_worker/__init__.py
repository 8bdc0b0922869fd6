"""tenuto_worker"""
