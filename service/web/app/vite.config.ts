import react from '@vitejs/plugin-react'
import { defineConfig } from 'vite'

// Addresses of files are relative, because a proxy may serve the page below a path prefix.
export default defineConfig({
  base: './',
  plugins: [react()],
  server: { proxy: { '/v1': 'http://127.0.0.1:8080', '/ray': 'http://127.0.0.1:8080' } },
  build: {
    outDir: '../static',
    emptyOutDir: true,
    target: 'es2022',
    sourcemap: false,
    license: { fileName: 'licenses.md' },
    manifest: true,
  },
})
