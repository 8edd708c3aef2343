import{b as a}from"./chunk-24JV4GVE.js";import"./chunk-HR5MYD4S.js";import"./chunk-OOJM4CTU.js";export{a as Answer};
