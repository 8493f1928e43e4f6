// Drives JupyterLab in headless Chromium: node jupyterlab.cjs URL TOKEN PICTURE
// New notebook, three cells (dataframe, describe, chart), picture, interrupt of an endless loop, restart.
// Prints "RESULT {json}" with the places of table and chart in the picture.
'use strict';
const { chromium } = require('playwright-core');

const [url, token, picture] = process.argv.slice(2);
const slow = Number(process.env.SLOW || '1'); // emulated machines take their time
const MINUTE = 60000 * slow;

const CELLS = [
  'import pandas as pd\n' +
    'df = pd.DataFrame({"day": range(1, 31), "visits": [(d * 37) % 50 + 3 * d for d in range(1, 31)]})\n' +
    'len(df)',
  'df.describe()',
  '%matplotlib inline\nimport matplotlib.pyplot as plt\n' +
    'df.plot(x="day", y="visits", color="#d62728", linewidth=4, figsize=(6, 3.2), title="Visits a day")\nplt.show()'
];

function step(text) {
  console.log(`${new Date().toISOString().slice(11, 23)} ${text}`);
}

/** The status bar says so only when the kernel is connected; a notebook without one looks idle elsewhere. */
function idle(page) {
  return page.locator('#jp-bottom-panel, #jp-main-statusbar').getByText(/\| Idle/).first().waitFor();
}

async function typeCell(page, code) {
  // The last cell is always the fresh one that Shift+Enter made.
  const editor = page.locator('.jp-Notebook .jp-CodeCell .cm-content').last();
  await editor.click();
  await page.keyboard.insertText(code);
  await page.keyboard.press('Shift+Enter');
}

async function command(page, ...keys) {
  await page.keyboard.press('Escape');
  for (const key of keys) {
    await page.keyboard.press(key);
  }
}

async function main() {
  const browser = await chromium.launch({
    executablePath: process.env.CHROMIUM || '/usr/bin/chromium',
    args: ['--no-sandbox', '--disable-dev-shm-usage', '--disable-gpu']
  });
  const page = await browser.newPage({ viewport: { width: 1180, height: 1000 } });
  page.setDefaultTimeout(MINUTE);
  try {
    await page.goto(`${url}lab?token=${token}&reset`);
    await page.locator('.jp-LauncherCard[data-category="Notebook"]').first().click();
    step('notebook opened');
    await page.locator('.jp-Notebook .jp-CodeCell').first().waitFor();
    await idle(page);
    step('kernel idle');
    // The file browser takes a third of the width: away with it.
    await page.keyboard.press('Control+b');
    for (const code of CELLS) {
      await typeCell(page, code);
    }
    const table = page.locator('.jp-OutputArea-output table.dataframe').first();
    await table.waitFor({ state: 'visible' });
    step('table visible');
    const chart = page.locator('.jp-OutputArea-output.jp-RenderedImage img, .jp-RenderedImage img').first();
    await chart.waitFor({ state: 'visible' });
    await page.waitForFunction(() => {
      const image = document.querySelector('.jp-RenderedImage img');
      return image && image.complete && image.naturalWidth > 100;
    });
    step('chart visible');
    const rows = await table.locator('tbody tr').count();
    if (rows !== 8) {
      throw new Error(`describe() shows ${rows} rows instead of 8`);
    }
    await page.evaluate(() => document.querySelector('.jp-WindowedPanel-outer')?.scrollTo(0, 0));
    await page.waitForTimeout(500);
    await page.screenshot({ path: picture });
    const places = { table: await table.boundingBox(), chart: await chart.boundingBox() };
    step('picture taken');

    await typeCell(page, 'print("looping", flush=True)\nwhile True: pass');
    await page.locator('.jp-OutputArea-output', { hasText: 'looping' }).last().waitFor();
    await command(page, 'i', 'i');
    await page.locator('.jp-OutputArea-output', { hasText: 'KeyboardInterrupt' }).last().waitFor();
    step('interrupted');

    await command(page, '0', '0');
    await page.locator('.jp-Dialog .jp-mod-accept').click();
    await page.locator('.jp-Dialog').waitFor({ state: 'detached' });
    await page.waitForTimeout(1000); // the state before the restart may still be shown
    await idle(page);
    await typeCell(page, 'print("df is", "known" if "df" in globals() else "forgotten")');
    await page.locator('.jp-OutputArea-output', { hasText: 'df is forgotten' }).last().waitFor();
    step('restarted');
    console.log('RESULT ' + JSON.stringify({ ...places, interrupted: true, forgotten: true }));
  } catch (error) {
    await page.screenshot({ path: picture + '.failed.png' }).catch(() => {});
    throw error;
  } finally {
    await browser.close();
  }
}

main().then(
  () => process.exit(0),
  error => {
    console.log('FAIL', error);
    process.exit(1);
  }
);
