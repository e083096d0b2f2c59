import { type CSSVariablesResolver, type MantineColorsTuple, createTheme, virtualColor } from '@mantine/core'

// prettier-ignore
const blue: MantineColorsTuple = ['#eef3fa', '#dbe5f3', '#b9cbe6', '#93afd9', '#7295cd', '#5c84c6', '#2f5fa8', '#27528f', '#20457a', '#183761']
// prettier-ignore
const sky: MantineColorsTuple = ['#eef4fd', '#dbe7fa', '#c3d7f6', '#abc6f2', '#9bbbef', '#8db3f0', '#7ea6e6', '#6d96d8', '#5c84c6', '#34496a']

export const theme = createTheme({
  // The one accent is a virtual colour: text on it has enough contrast in both colour schemes.
  colors: { blue, sky, accent: virtualColor({ name: 'accent', light: 'blue', dark: 'sky' }) },
  primaryColor: 'accent',
  primaryShade: 6,
  autoContrast: true,
  fontFamily: '-apple-system, BlinkMacSystemFont, "Segoe UI", Inter, Roboto, "Helvetica Neue", Arial, sans-serif',
  fontSizes: { xs: '12.5px', sm: '13.5px', md: '15px', lg: '18px', xl: '24px' },
  headings: { fontWeight: '600' },
  defaultRadius: 'sm',
  respectReducedMotion: true,
})

/** The page's paper and ink, and those of Mantine's colours that have too little contrast on it (WCAG 2.2 AA). */
export const variables: CSSVariablesResolver = () => ({
  variables: {},
  light: {
    '--mantine-color-body': '#fdfdfb',
    '--mantine-color-text': '#1c1e21',
    '--mantine-color-dimmed': '#5d636b',
    '--mantine-color-error': '#b3382c',
    '--mantine-color-red-outline': '#b3382c',
    '--mantine-color-orange-outline': '#9a5317',
    '--mantine-color-placeholder': '#6c727a',
  },
  dark: {
    '--mantine-color-body': '#15171a',
    '--mantine-color-text': '#e6e7e8',
    '--mantine-color-dimmed': '#a2a8b0',
    '--mantine-color-error': '#ee8377',
    '--mantine-color-red-outline': '#ee8377',
    '--mantine-color-orange-outline': '#e0a064',
    '--mantine-color-placeholder': '#8f969e',
  },
})
